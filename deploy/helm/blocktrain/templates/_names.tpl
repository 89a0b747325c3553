{{- define "blocktrain.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "blocktrain.labels" -}}
app.kubernetes.io/name: blocktrain
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "blocktrain.image" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* As the image's own user, whose number is in deploy/Containerfile. */}}
{{- define "blocktrain.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
fsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "blocktrain.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: { drop: ["ALL"] }
{{- end }}
